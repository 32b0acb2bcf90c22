"""Where a stage runs, under which key its result is cached, and how often it is retried.

caching         the Prefect task of a stage, and the key of its result
fingerprint     what code a stage reaches: the part of its key that sees edits
versions        the versions of the libraries, recorded with a run
stages          the stages by name, and how one is cut into shards
dispatch        the choice: this process, a child, a pool's workers, shards
call            a stage and its arguments as JSON, and its outcome
child_process   children that keep their model, and are killed at a timeout
child_main      the child's side of that
pool            a stage sent to a work pool of the Prefect server
pool_run        its flow run, watched until it ends or its worker has died
cancellation    how an interrupt reaches the stages that are waited for
errors          errors of stages: which are retryable, and all of them as JSON
retries         how often each kind of error is retried
out_of_memory   batches halved when a device's memory is too small
resources       what a process keeps between stages, owned by the run
"""
