"""Artifacts of a stage: complete or absent under a manifest with sha256, verified when read.

reference        ArtifactRef and PolicyRef, which tasks pass to each other
manifest         the file that makes a folder an artifact
store            finds, commits, reads and restores the artifacts of a run; open_store opens it from a configuration
replace          deletes files of an artifact under a tombstone
files            files of artifacts, verified
run_description  run.json and config.yaml
"""
