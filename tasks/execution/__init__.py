"""Where a stage is done: here, in a process that can be ended, or by the workers of a pool; and what is tried again.

stages      the stages by name, and how one is cut into shards
place       chooses the place that the configuration names
shards      a stage done in parts, joined in order
call        a stage and its arguments as JSON, with what came of it
supervised  a child process that keeps its model, and is killed when a stage is over its time
process     that child
pool        a stage sent to a work pool of the Prefect server
pool_run    its flow run, followed until it has ended or its worker is gone
faults      which errors may pass by themselves, and how often each kind is tried again
memory      a stage that ran out of memory, done again in halves
"""
