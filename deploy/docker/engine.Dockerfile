# syntax=docker/dockerfile:1
# A vLLM image that knows kvoffd. Built from the repository's root:
#   docker build --file deploy/docker/engine.Dockerfile --tag vllm-kvoffd:0.32.0 .
# vLLM's own packages are left as they are: kvoffd brings no torch and pins nothing of vLLM's.

ARG VLLM_IMAGE=public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v0.32.0

FROM ${VLLM_IMAGE}
# Which user the engine runs as is the base image's matter, and the daemon's allowed_uids.
# Some of vLLM's images keep vLLM in a virtual environment, some in the system's Python: python3 is the right one.
RUN --mount=type=bind,target=/source,rw uv pip install --no-cache --python "$(command -v python3)" /source
