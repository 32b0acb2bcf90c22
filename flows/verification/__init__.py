"""`grpo verify`: stored stages are computed again from their stored inputs, and compared; the run is not written.

verify          the flow: open the run, choose, compute, report
opened          a stored run: its configuration, its prompts and model here, and its own record
choice          which stages are computed again, and what counts as rounding
stored_stages   the stages of a run with the arguments that computed them, by the functions of the training loop
recompute       compute one stage in a scratch root, compare, and find which difference explains which
causes          why a stage may differ, from what the run and this checkout record
"""
