"""What all flows share.

requests      the options of evaluate, rescore and replay, which are also the forms of Prefect's UI
forms         how Prefect shows and reads those forms
run           opens a run from a configuration
lineage       what a run's results were made with, and what the next start keeps of them
warm_start    another run's policy as the start of a run
stages        how flows call the four stages
flow_run_page what Prefect's UI shows of a run while it works: its log, progress bars
"""
