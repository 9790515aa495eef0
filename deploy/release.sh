#!/bin/sh
# Builds, signs and publishes a release; deploy/RELEASE.md. `make release KEY=GPG-KEY REGISTRY=HOST/NAME [PUBLISH=yes]`
set -eu
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' kvoffd/__init__.py)
: "${KEY:?names the GPG key that signs}" "${REGISTRY:?names the registry of image and chart, as registry.example.com/kvoffd}"
if [ "$(git describe --tags --exact-match --dirty 2>/dev/null)" != "v$version" ]; then
    echo "The tree is not the tag v$version without changes: commit, then git tag --sign v$version." >&2
    exit 1
fi
for tool in podman buildah docker; do
    command -v "$tool" >/dev/null && break
done

make dist
make deb image
make image PEERS=yes
# A chart is its directory, with the manifest that it reads in place of the link.
tar --create --gzip --dereference --sort=name --owner=0 --group=0 --numeric-owner \
    --mtime="@$(git log -1 --format=%ct)" --directory deploy/helm --file "dist/kvoffd-chart-$version.tgz" kvoffd
(cd dist && rm -f SHA256SUMS* && sha256sum -- * >SHA256SUMS)
gpg --local-user "$KEY" --armor --detach-sign dist/SHA256SUMS

# Prints each command; runs it only where it may publish.
publish() {
    echo "+ $*"
    [ "${PUBLISH:-}" != yes ] || "$@"
}
# The chart takes the second where there are peers.
for tag in "$version" "$version-peers"; do
    publish "$tool" tag "kvoffd:$tag" "$REGISTRY/kvoffd:$tag"
    publish "$tool" push "$REGISTRY/kvoffd:$tag"
    publish cosign sign --yes "$REGISTRY/kvoffd:$tag"
done
publish helm push "dist/kvoffd-chart-$version.tgz" "oci://$REGISTRY/charts"
publish twine upload "dist/kvoffd-$version.tar.gz" dist/*.whl
publish git push origin "v$version"
publish gh release create "v$version" --notes-file CHANGELOG.md dist/*.deb dist/SHA256SUMS dist/SHA256SUMS.asc
[ "${PUBLISH:-}" = yes ] || echo "Nothing was published: the same with PUBLISH=yes runs the commands above."
