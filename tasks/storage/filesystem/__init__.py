"""Files on a disk or in a bucket: complete or absent, with clear messages when storage fails.

roots       opens any fsspec URL as the root of all runs
files       fsync, rename, sha256, locked staging folders, small JSON documents with a checksum
failures    a full disk or a refusing bucket as one error
"""
