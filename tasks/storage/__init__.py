"""Where stages leave their results: whole or not at all, and verified when read.

reference   the small record that stands for an artifact
manifest    the file that makes a folder an artifact
names       what may stand in them as a name
store       artifacts of a run: run_folder has its paths and small files, whole says what is whole in it,
            committing makes artifacts, succession takes files away from them; configured opens it
description what a run says of itself, in run.json and config.yaml; lineage is what made what stands in it
artifact_files  their files, read and verified; read_cache keeps copies of those of a bucket
roots       any fsspec URL as the root of all runs
staging     folders of running processes; a killed one's are cleared away
run_lock    one writer at a time: file_lock on a local disk, a lease in a bucket; lock_holder says whose it is
failures    a disk that is full, a bucket that refuses: told in one message
files       fsync, rename, sha256: the steps that make a write whole
codec       references as Prefect results; one whose files are gone is a cache miss
records     which stage made which artifact: those results, kept in the run's folder and checked
schemas     the columns of every table, versioned, with the features that `datasets` reads
tables      Parquet in and out
"""
