#!/bin/sh
# Prints the package's version for kvoffd's: `package_version.sh VERSION [SECONDS]`. A build of a commit after a release, as
# 0.2.0+g1a2b3c4d5e6f, gets its time: 0.2.0+git20261129.140305.g1a2b3c4d5e6f sorts after 0.2.0 and earlier builds, and
# before the next release. The time is SECONDS since 1970, by default $SOURCE_DATE_EPOCH, else now.
set -eu
case $1 in
*+*)
    seconds=${2:-${SOURCE_DATE_EPOCH:-$(date +%s)}}
    echo "${1%%+*}+git$(date -u -d "@$seconds" +%Y%m%d.%H%M%S).${1#*+}"
    ;;
*) echo "$1" ;;
esac
