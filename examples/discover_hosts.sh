#!/bin/sh
# A discovery script: prints the hosts that there are now, one "host:slots" a line. elasticrun asks it each second.
#
# This one prints a file, which you edit while the job runs: the one that HOSTS_FILE names, else ./hosts. A real one would
# ask a cluster manager or a cloud. To fail is allowed, now and then: the hosts then stay as they are. To add or remove
# hosts, write another file and move it over this one, so that no half-written list is ever read.
set -eu
cat "${HOSTS_FILE:-hosts}"
