"""Where everything is kept, on any fsspec root.

artifacts        a run's folder; artifacts under manifests with sha256; the store of a run
roots            opens a storage root, and turns its failures into one clear error
links            refuses paths that a link leads out of their run
files            atomic writes on disks and buckets
lease, run_lock  one writer at a time: in a bucket by a lease, elsewhere by a lock
schemas          the columns of every Parquet table; parquet and lists read and write them
prefect_results  which stage made which artifact, as Prefect's results without pickle
"""
