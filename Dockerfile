# The training image: this checkout at /grpo with the locked packages, for workers and for runs of a work pool.
#
#     docker build --tag grpo .                              GPUs: torch with its CUDA libraries, as the lock has it
#     docker build --tag grpo:cpu --build-arg TORCH=cpu .    the same packages with torch's CPU build, 5 GB less
#
# A GPU needs the NVIDIA container toolkit on the host: docker run --gpus all grpo grpo worker gpu
FROM ghcr.io/astral-sh/uv:0.9.7 AS uv

FROM python:3.11-slim-bookworm
ARG TORCH=cuda
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
COPY --from=uv /uv /usr/local/bin/uv
WORKDIR /grpo
ENV VIRTUAL_ENV=/grpo/.venv PATH=/grpo/.venv/bin:$PATH UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 PYTHONUNBUFFERED=1 HF_HOME=/cache/huggingface

# First the packages, which change rarely. The CPU builds of torch are not on the package index and have other hashes,
# so they come by version from torch's own index.
COPY requirements.lock ./
RUN --mount=type=cache,target=/root/.cache/uv \
    uv venv "$VIRTUAL_ENV" \
    && if [ "$TORCH" = cpu ]; then \
        awk '/^[^ #]/ { skip = /^(torch|torchvision|triton|nvidia-[^ ]*|cuda-[^ ]*)==/ } !skip' requirements.lock > /tmp/lock \
        && uv pip sync --require-hashes /tmp/lock \
        && awk -F '[= ]+' '/^torch(vision)?==/ { print $1 "==" $2 "+cpu" }' requirements.lock > /tmp/torch \
        && uv pip install --no-deps --index-url https://download.pytorch.org/whl/cpu --requirement /tmp/torch; \
    else \
        uv pip sync --require-hashes requirements.lock; \
    fi

COPY . ./
RUN uv pip install --no-deps --no-build-isolation --editable . \
    && useradd --create-home --uid 1000 grpo \
    && mkdir --parents /cache/huggingface \
    && chown --recursive grpo /cache
USER 1000

# No entrypoint: a Kubernetes or Docker work pool starts `prefect flow-run execute` in it.
CMD ["grpo", "--help"]
