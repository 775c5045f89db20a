#!/bin/sh
# What the tests marked `system` need besides Python, from Debian or Ubuntu; only what is not there yet. Without root
# nothing is installed, and the tests say what they miss.
set -eu
missing=
need() { # program package
    PATH="$PATH:/usr/sbin" command -v "$1" >/dev/null || missing="$missing $2"
}
need promtool prometheus
need systemd-analyze systemd
need kubectl kubernetes-client
need ip iproute2
need nft nftables
need slurmctld slurmctld
need slurmd slurmd
need srun slurm-client
need munged munge
need chromium chromium
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -eq 0 ]; then
    sudo=
elif sudo -n true 2>/dev/null; then
    sudo=sudo
else
    echo "not root, so not installed:$missing" >&2
    exit 0
fi
$sudo apt-get update -q
for package in $missing; do # one by one: not every distribution has each of them
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends "$package" ||
        echo "not installed: $package" >&2
done
