"""One writer at a time.

run_lock     locks a run or a part of it: a locked file on a local disk, a lease in a bucket
lease        a lock in a bucket that its holder renews; a stale one is taken over
lock_holder  the process that holds a lock: host, PID, start, command
"""
