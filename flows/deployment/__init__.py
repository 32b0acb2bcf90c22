"""`grpo deploy`: training, evaluation and rescoring of a configuration, registered with Prefect's server.

deploy        what is asked for, checked and carried out; terminal prints it
deployments   what is registered: flow, parameters, schedule, limit, tags
"""
