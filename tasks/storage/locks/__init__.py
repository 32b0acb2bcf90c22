"""One writer at a time.

run_lock  locks a run or a part of it: a locked file on a local disk, a lease in a bucket
lease     the process that holds a lock; a lock in a bucket that its holder renews, taken over when it is stale
"""
