"""What all flows share.

requests      the options of evaluate, rescore and replay, which are also the forms of Prefect's UI
forms         how Prefect shows and reads those forms
run           a configuration becomes an open run
stages        how flows call the four stages
run_summary   metrics that every summary has
"""
