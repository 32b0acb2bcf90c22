"""Stage 4.

update_policy   the stage: stored rollouts and advantages -> the next policy version
job             what an update is asked for and what it made, and where it cannot run
component       the update of each component, from the previous version's files to the next one's
rows            stored rollouts joined with their advantages -> the rows that each algorithm trains on
process         updates in the processes of the devices
machines        updates that several machines share
"""
