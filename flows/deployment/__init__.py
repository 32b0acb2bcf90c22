"""`grpo deploy`: registers training, evaluation and rescoring of a configuration with Prefect's server.

deploy        checks the options and registers the deployments
deployments   the deployments: flow, parameters, schedule, limit, tags
"""
