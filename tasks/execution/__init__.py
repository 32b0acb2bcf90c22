"""How a stage is called: its key, where it runs, and what happens when it fails.

caching         the Prefect task of a stage: the key of its result, and its retries
fingerprint     what code a stage reaches: the part of its key that sees edits
dispatch        the choice: this process, a child, that of a device, a pool's workers, shards
call            the stages by name, their shards, a call as JSON, and its outcome
devices         the processes of a run's devices, which take stages in turn
child_process   children that keep their model, and are killed at a timeout
child_main      the child's side of that
work_pool       a stage sent to a work pool of the Prefect server, and watched until it ends
errors          errors of stages: which are retryable, and all of them as JSON
resources       what a process keeps between stages, its device memory, and the signals that stop it
"""
