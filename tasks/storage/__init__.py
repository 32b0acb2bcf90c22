"""Storage of the stages' results: complete or absent, and verified when read.

artifacts        a run's folder on any fsspec root; artifacts under manifests with sha256; the store of a run
filesystem       atomic writes, opened roots, leases, storage errors
run_lock         one writer at a time
tables           schemas of the Parquet tables, reading and writing them
prefect_results  which stage made which artifact, as Prefect's results without pickle
"""
