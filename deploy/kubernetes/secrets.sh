#!/bin/sh
# secrets.sh KEYS: print the Secrets and the ConfigMap with the keys of a run, from a folder made by `actors keys new`.
#
#   actors keys new keys && deploy/kubernetes/secrets.sh keys | kubectl apply -n grpo -f -
#
# Only the packer's pod uses bus-server. The first call creates the engines' API key as KEYS/engine.key.
set -eu
keys=${1:?"the folder of keys; \`actors keys new FOLDER\` creates one"}
if [ ! -e "$keys/engine.key" ]; then
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$keys/engine.key")
fi
show() { kubectl create "$@" --dry-run=client -o yaml; }
show secret generic bus-server --from-file="$keys/server.secret"
echo ---
show secret generic bus-client --from-file="$keys/client.secret"
echo ---
show configmap bus-public --from-file="$keys/server.public" --from-file="$keys/client.public"
echo ---
show secret generic engine-api-key --from-file=key="$keys/engine.key"
