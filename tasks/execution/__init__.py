"""Where a stage runs, under which key its result is cached, and how often it is retried.

caching         the Prefect task of a stage: the key of its result, and its retries
fingerprint     what code a stage reaches: the part of its key that sees edits
stages          the stages by name, and how one is cut into shards
dispatch        the choice: this process, a child, a pool's workers, shards
call            a stage and its arguments as JSON, and its outcome
child_process   children that keep their model, and are killed at a timeout
child_main      the child's side of that
work_pool       a stage sent to a work pool of the Prefect server, and watched until it ends
errors          errors of stages: which are retryable, and all of them as JSON
memory          what a stage took on its device, and batches halved where that was too much
resources       what a process keeps between stages, owned by the run, and the signals that stop them
"""
