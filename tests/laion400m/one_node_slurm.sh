#!/usr/bin/env bash
# A whole SLURM on this machine, in one folder and without rights: munged, slurmctld and slurmd of the Debian packages
# slurm-wlm and munge, started by the user who asks. It touches no other SLURM: sockets, ports and keys are its own.
#   bash one_node_slurm.sh start FOLDER       then: export SLURM_CONF=FOLDER/slurm.conf
#   bash one_node_slurm.sh stop FOLDER
set -euo pipefail
action=$1
mkdir -p "$2"
folder=$(realpath "$2")
node=$(hostname -s)
export SLURM_CONF=$folder/slurm.conf

free_ports() {
    python3 -c '
import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(each.getsockname()[1] for each in sockets))'
}

write_configuration() {
    local user controller daemon
    user=$(id -un)
    read -r controller daemon < <(free_ports)
    mkdir -p "$folder/state" "$folder/spool" "$folder/cgroup"
    # No cgroup is used; 22.05 opens the plugin all the same, and this one needs no cgroups to do so.
    printf '%s\n' CgroupPlugin=cgroup/v1 "CgroupMountpoint=$folder/cgroup" >"$folder/cgroup.conf"
    # Jobs of the partition urgent put those of the default one back into the queue, after a grace time.
    # Four CPUs and much memory, whatever the machine has (config_overrides), so that small jobs run side by side.
    cat >"$SLURM_CONF" <<CONFIGURATION
ClusterName=one
SlurmctldHost=$node(127.0.0.1)
SlurmUser=$user
SlurmdUser=$user
SlurmctldPort=$controller
SlurmdPort=$daemon
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait=20
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
NodeName=$node NodeAddr=127.0.0.1 CPUs=4 RealMemory=65536 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
CONFIGURATION
}

start() {
    write_configuration
    (umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
    # --force: the key's folder is the user's, not munge's.
    munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
        --log-file="$folder/munged.log" --seed-file="$folder/munge.seed" 2>/dev/null
    slurmctld >/dev/null 2>&1
    slurmd -N "$node" >/dev/null 2>&1
    for _ in $(seq 100); do
        [ "$(sinfo --noheader --format=%t 2>/dev/null)" != idle ] || return 0
        sleep 0.2
    done
    echo "the node is not up after 20 seconds: see $folder/slurmctld.log and slurmd.log" >&2
    stop
    return 1
}

stop() {
    local daemon
    scancel --full --signal=KILL --user="$(id -un)" 2>/dev/null || true
    for _ in $(seq 50); do # their processes end after them
        [ -n "$(squeue --noheader 2>/dev/null)" ] || break
        sleep 0.2
    done
    for daemon in slurmd slurmctld munged; do
        [ ! -f "$folder/$daemon.pid" ] || kill "$(cat "$folder/$daemon.pid")" 2>/dev/null || true
    done
}

"$action"
