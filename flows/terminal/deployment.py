"""Prints what `grpo deploy` registered."""

from rich.console import Console

from flows.deployment.deploy import DeployedRun


def show_deployed(deployed: DeployedRun) -> None:
    """Print each deployment with its page, and how to run it."""
    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    say(f"{deployed.run}: registered for the work pool {deployed.pool}")
    for each in deployed.deployments:
        say(f"  {each.name}, {'updated' if each.updated else 'new'}")
        say(f"    schedule: {each.schedule or 'none'}")
        if each.url:
            say(f"    {each.url}")
    say("A worker, in a checkout of this project:")
    say(f"  {worker_command(deployed)}")
    say("A run by hand:")
    say(f"  prefect deployment run '{deployed.deployments[0].name}'")
    if "://" not in deployed.root and not deployed.root.startswith(("/", "~")):
        say(f"Runs are kept in {deployed.root}/ of the worker's checkout.")


def worker_command(deployed: DeployedRun) -> str:
    """Return the command that starts a worker of the pool."""
    if deployed.pool_type == "grpo":
        return f"grpo worker {deployed.pool}"
    return f"prefect worker start --pool {deployed.pool}"
