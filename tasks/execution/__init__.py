"""How a stage is called: its key, where it runs, and what happens when it fails.

caching         the Prefect task of a stage: the key of its result, and its retries
fingerprint     what code a stage reaches: the part of its key that sees edits
stage           the stages by name, their shards, and where one runs: here, a child, devices, a pool, shards
dispatch        runs a stage there
call            a call of a stage as JSON, and its outcome
devices         the processes of a run's devices, which take stages in turn
child_process   children that keep their model, and are killed at a timeout
child_main      the child's side of that
server_process  servers that a process starts for itself; guard_main ends them with it
work_pool       a stage sent to a work pool of the Prefect server, and watched until it ends
errors          errors of stages: which are retryable, and all of them as JSON
resources       what a process keeps between stages, and its device memory
stopping        the signals that stop a run
"""
