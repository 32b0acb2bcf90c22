"""Artifacts: files under a manifest with their sha256, verified whenever they are read.

run_folder  one run's paths, small files, staging, commit lock, `quarantine/`, earlier runs
reference   ArtifactRef and PolicyRef, which tasks pass to each other, and the manifest that makes a folder an artifact
files       files of artifacts, verified; bounded copies of what was read from a bucket
store       reads the artifacts of a run; opens them as a configuration says
commit      writes artifacts, and deletes files of one under a tombstone
restore     copies an artifact to its place from where else it is valid
"""
