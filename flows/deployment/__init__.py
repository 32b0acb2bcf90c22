"""`grpo deploy`: training, evaluation and rescoring of a configuration, registered with Prefect's server.

deploy        checks the options and registers the deployments
deployments   what is registered: flow, parameters, schedule, limit, tags
"""
