"""What all flows share.

run         opens a run from a configuration
lineage     what a run's results were made with, what the next start keeps of them, and a start from another's policy
changes     names what differs between them and a start
stages      how flows call the four stages, and those of an evaluation
prefect_ui  the forms of flows, and what a flow run shows while it works: its log, progress bars, reports
"""
