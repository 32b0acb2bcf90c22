"""Files on a disk or in a bucket: complete or absent, with clear messages when storage fails."""
