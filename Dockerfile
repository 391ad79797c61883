# MegatronDPP, ready to run: docker build -t megatron-dpp .
#
# With GPUs start from NVIDIA's image, whose PyTorch and Transformer Engine stay as they are:
#   docker build -t megatron-dpp --build-arg BASE=nvcr.io/nvidia/pytorch:25.06-py3 .
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# A compiler for the extension, and the library that RDMA cards are opened with.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ ibverbs-providers libibverbs1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace/megatron-dpp

# What is installed changes seldom: it stands in a layer of its own. If the base has no PyTorch, set-up
# installs one; TORCH_INDEX_URL names the index, for example of builds without CUDA.
ARG TORCH_INDEX_URL=
ENV TORCH_INDEX_URL=${TORCH_INDEX_URL} PIP_NO_CACHE_DIR=1
COPY requirements.txt setup.py ./
COPY tools tools
COPY csrc csrc
COPY megatron megatron
RUN bash tools/setup.sh

COPY . .
ENV PATH=/workspace/megatron-dpp:${PATH}
RUN megatron-dpp --version
CMD ["bash", "run_single_gpt.sh"]
