"""Work pools for the project's own workers."""

import contextlib

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import WorkPool
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.workers.process import ProcessWorker

KIND = "grpo"
"""Type of the work pools that `grpo worker` serves."""


async def read_or_create_pool(client: PrefectClient, name: str) -> WorkPool:
    """Return the pool of this name, whatever its type; one that does not exist is created for `grpo worker`."""
    try:
        return await client.read_work_pool(name)
    except ObjectNotFound:
        # Workers of this type have the settings of Prefect's process workers.
        template = ProcessWorker.get_default_base_job_template()
        # A worker of the pool may start at the same moment.
        with contextlib.suppress(ObjectAlreadyExists):
            await client.create_work_pool(WorkPoolCreate(name=name, type=KIND, base_job_template=template))
        return await client.read_work_pool(name)
