"""`grpo verify`: stored stages are computed again from their stored inputs, and compared; the run is not written.

And `grpo evaluate EXPORT --card`, the same for the evaluation of an exported policy.

verify          the flow: open the run, choose, compute, report
opened          a stored run: its configuration, its prompts and model here, and its own record
choice          which stages are computed again, and what counts as rounding
stored_stages   the stages of a run with the arguments that computed them, by the functions of the training loop
stored_plans    the prompts and seeds of stored rows as a plan, compared with what the prompt files plan
trusted         what a stage would run, connect to or read, only if the person knows it
recompute       compute one stage in a scratch root, compare, and find which difference explains which
repeated_evaluation   the evaluation of an exported folder's card, repeated from the folder alone and compared
causes          why a stage may differ, from what the run and this checkout record
"""
