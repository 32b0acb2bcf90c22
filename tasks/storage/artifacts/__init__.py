"""Artifacts of a stage: complete or absent under a manifest with sha256, verified when read.

run_folder  one run's paths, small files, staging, commit lock, `quarantine/`, earlier runs
reference   ArtifactRef and PolicyRef, which tasks pass to each other, and the manifest that makes a folder an artifact
files       files of artifacts, verified; bounded copies of what was read from a bucket
commit      writes artifacts
tombstones  deletes files of an artifact under a tombstone
store       reads and restores the artifacts of a run; opens them as a configuration says
"""
