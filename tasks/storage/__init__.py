"""Where stages leave their results: whole or not at all, and verified when read.

reference   the small record that stands for an artifact
manifest    the file that makes a folder an artifact
store       a run's folder: staging, committing, verifying, setting aside, bringing home
staging     folders of running processes; a killed one's are cleared away
failures    a disk that is full, told in one message
files       fsync, rename, sha256: the steps that make a write whole
codec       references as Prefect results; one whose files are gone is a cache miss
records     which stage made which artifact: those results, kept in the run's folder and checked
schemas     the columns of every table, versioned, with the features that `datasets` reads
tables      Parquet in and out
"""
