#!/bin/sh
# Builds the image kvoffd:VERSION with the first of podman, buildah and docker that is there; arguments are those of `build`.
# With the variable PEERS=yes it has NIXL, and is kvoffd:VERSION-peers.
set -eu
cd "$(dirname "$0")/../.."
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' kvoffd/__init__.py)
revision=$(git describe --always --dirty --abbrev=40 2>/dev/null || echo unknown)
# The commit's time, where there is one, so that the same commit gives the same labels.
created=$(date --utc --date="@${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}" +%Y-%m-%dT%H:%M:%SZ)
# A build that is no release has a tag of its own too.
commit=$(printf %s "$revision" | sed -n 's/.*\([0-9a-f]\{12\}\)[0-9a-f]\{28\}\(-dirty\)\{0,1\}$/-g\1\2/p')
[ -z "$commit" ] || set -- --tag "kvoffd:$version$commit" "$@"
for tool in podman buildah docker; do
    command -v "$tool" >/dev/null && break
done
# docker's own format, since OCI's has no HEALTHCHECK; docker itself has no other, and finds the list of files by itself.
if [ "$tool" != docker ]; then
    set -- --format docker --ignorefile deploy/docker/Dockerfile.dockerignore "$@"
fi
if ! "$tool" build --file deploy/docker/Dockerfile \
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision" --build-arg "CREATED=$created" \
    --build-arg "PEERS=${PEERS:-}" --tag "kvoffd:$version${PEERS:+-peers}" "$@" .; then
    echo "The image was not built. Where no registry is in reach, name a base that is here:" \
        "make image ARGS='--build-arg BASE=NAME'; \`make delivery\` makes one with mmdebstrap." >&2
    exit 1
fi
