"""Files on a disk or in a bucket: complete or absent, with clear messages when storage fails.

roots     opens any fsspec URL as the root of all runs
files     fsync, rename, sha256, locked staging folders, small JSON documents with a checksum
lease     the process that holds a lock; a lock in a bucket that its holder renews, taken over when it is stale
failures  a full disk or a refusing bucket as one error
"""
