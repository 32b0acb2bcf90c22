"""What `grpo deploy` leaves on the server of the tests."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectAlreadyExists, PrefectHTTPStatusError

from configs.loader import read_config
from flows.deploy import DeployedRun, deploy_run
from flows.pipeline.requests import DeployRequest
from tests.flows.conftest import REPOSITORY, TINY

POOL = "deploy-tests"
MIX = REPOSITORY / "configs" / "rewards" / "mix.yaml"


def make_pool() -> str:
    """A pool without workers."""

    async def made() -> None:
        async with get_client() as client:
            try:
                await client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
            except ObjectAlreadyExists:
                return

    asyncio.run(made())
    return POOL


def deployed(file: Path = TINY, run: str = "nightly", **requested: Any) -> DeployedRun:
    config = read_config(file, [f"run.name={run}", *requested.pop("overrides", ())])
    return asyncio.run(deploy_run(DeployRequest(pool=POOL, **requested), config))


def on_the_server(run: str) -> dict[str, DeploymentResponse]:
    """Deployments with the run's tag, by the name of their flow and their own."""

    async def read() -> dict[str, DeploymentResponse]:
        async with get_client() as client:
            tagged = DeploymentFilter(tags=DeploymentFilterTags(all_=["grpo", run]))
            found = await client.read_deployments(deployment_filter=tagged)
            flows = {each.flow_id: (await client.read_flow(each.flow_id)).name for each in found}
            return {f"{flows[each.flow_id]}/{each.name}": each for each in found}

    return asyncio.run(read())


def asked_for(deployment: DeploymentResponse, *several: Mapping[str, Any]) -> list[str | None]:
    """What the server says against flow runs with these parameters; None where it accepts them."""

    async def create(client: PrefectClient, parameters: Mapping[str, Any]) -> str | None:
        try:
            run = await client.create_flow_run_from_deployment(deployment.id, parameters=dict(parameters))
        except PrefectHTTPStatusError as error:
            return str(error.response.json()["detail"])
        await client.delete_flow_run(run.id)
        return None

    async def create_all() -> list[str | None]:
        async with get_client() as client:
            return [await create(client, parameters) for parameters in several]

    return asyncio.run(create_all())
