#!/bin/sh
# Runs a command on a host of the cluster, in place of ssh: agent.sh HOST COMMAND.
# A host is a network namespace.  It also gets a host name of its own, by which MPI knows what is local.
while [ "${1#-}" != "$1" ]; do shift; done # options of ssh
host=$1
shift
exec ip netns exec "$CLUSTER-${host##*.}" unshare -u sh -c 'hostname "$0" && exec sh -c "$1"' \
    "$CLUSTER-${host##*.}" "$*"
