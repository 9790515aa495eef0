#!/bin/sh
# Builds kvoffd_VERSION_ARCHITECTURE.deb for this release of Debian or Ubuntu: `build_deb.sh WHEELS DIRECTORY`.
# WHEELS has the wheels of kvoffd and of all that it needs, for this release's Python (`pip download`, or `pip wheel`);
# the package brings them along, below /usr/lib/kvoffd; NIXL's, for peers, only if its wheel is there too. Needs dpkg-deb and python3 with pip (python3-venv).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
deploy=$(dirname "$here")
wheels=$1
directory=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
library=/usr/lib/kvoffd
umask 022

/usr/bin/python3 -m venv "$work/pip"
"$work/pip/bin/pip" install --quiet --no-index --find-links "$wheels" --no-compile --target "$root$library" 'kvoffd[s3]'
for nixl in "$wheels"/nixl_cu12-*.whl; do
    [ ! -e "$nixl" ] ||
        "$work/pip/bin/pip" install --quiet --no-index --no-deps --no-compile --target "$root$library" "$nixl"
done
rm -r "$root$library/bin"
version=$("$here/package_version.sh" "$(PYTHONPATH=$root$library /usr/bin/python3 -B -c \
    'import kvoffd; from kvoffd_proto.build import with_commit; print(with_commit(kvoffd.__version__))')")
python=$(/usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
next=$(/usr/bin/python3 -c 'import sys; print("%d.%d" % (sys.version_info[0], sys.version_info[1] + 1))')

install -d "$root/usr/bin" "$root/usr/share/bash-completion/completions" \
    "$root/usr/share/doc/kvoffd" "$root/DEBIAN"
for program in kvoffd:kvoffd.__main__ kvoffd-cli:kvoffd_client.cli; do
    printf '#!/usr/bin/python3\nimport sys\n\nsys.path.insert(0, "%s")\n\nfrom %s import main\n\nsys.exit(main())\n' \
        "$library" "${program#*:}" >"$root/usr/bin/${program%:*}"
    chmod 755 "$root/usr/bin/${program%:*}"
done
PYTHONPATH=$root$library _KVOFFD_CLI_COMPLETE=source_bash /usr/bin/python3 -B -c 'from kvoffd_client.cli import main; main([])' \
    >"$root/usr/share/bash-completion/completions/kvoffd-cli"
install -Dm644 "$deploy/kvoffd.toml" "$root/etc/kvoffd/kvoffd.toml"
install -Dm644 "$deploy/systemd/kvoffd.sysusers.conf" "$root/usr/lib/sysusers.d/kvoffd.conf"
install -Dm644 "$deploy/systemd/gpu.conf" "$root/usr/share/doc/kvoffd/examples/gpu.conf"
install -d "$root/lib/systemd/system"
sed 's|/opt/kvoffd/bin/|/usr/bin/|' "$deploy/systemd/kvoffd.service" >"$root/lib/systemd/system/kvoffd.service"
install -m644 "$deploy/../LICENSE" "$root/usr/share/doc/kvoffd/copyright"
install -m644 "$deploy/README.md" "$root/usr/share/doc/kvoffd/README.md"

cp "$here/postinst" "$here/prerm" "$here/postrm" "$root/DEBIAN/"
chmod 755 "$root"/DEBIAN/p*
echo /etc/kvoffd/kvoffd.toml >"$root/DEBIAN/conffiles"
cat >"$root/DEBIAN/control" <<EOF
Package: kvoffd
Version: $version
Architecture: $(dpkg --print-architecture)
Maintainer: The kvoffd authors <kvoffd@localhost>
Installed-Size: $(du -sk "$root" | cut -f1)
Depends: python3 (>= $python), python3 (<< $next), libc6 (>= 2.17), libstdc++6, systemd | systemd-standalone-sysusers
Recommends: ca-certificates
Section: utils
Priority: optional
Description: host memory and disks for the KV cache of LLM engines
 A daemon, one per node, keeps the KV cache blocks of engines such as vLLM in a
 pool of host memory and on local disks, and gives them back when a prompt needs
 them. This package has the daemon and its console; engines need the wheel.
EOF
(cd "$root" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
# xz at its best takes a minute of a core for an eighth less.
dpkg-deb --root-owner-group -z2 --build "$root" "$directory/kvoffd_${version}_$(dpkg --print-architecture).deb"
