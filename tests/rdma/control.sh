#!/usr/bin/env bash
# Runs in the guest before our own tests: the two devices reach each other without a line of our
# code, with verbs alone and with the RDMA connection manager. A failure here is the fabric's.
set -uo pipefail

# Waits for a server, up to five minutes: finds its line in what a command prints.
await() {
  local line=$1
  shift
  for ((tries = 0; tries < 3000; ++tries)); do
    ! "$@" 2>/dev/null | grep -q "$line" || return 0
    sleep 0.1
  done
  echo "no server after 5 minutes: $*" >&2
  return 1
}

await_port() { await : ss -Htln "sport = :$1"; }

pingpong() {
  ibv_rc_pingpong -d rdma0 -g 1 -n 100 >/dev/null &
  await_port 18515
  ibv_rc_pingpong -d rdma1 -g 1 -n 100 10.99.0.1 | grep iters && wait $!
}

# The client names its own address too: else its packets to an address of this machine take the
# loopback device.
ping() {
  rping -s -a 10.99.0.1 -C 20 -V &
  await LISTEN rdma resource show cm_id
  rping -c -a 10.99.0.1 -I 10.99.0.2 -C 20 -V && wait $! && echo "20 rpings"
}

if ! pingpong || ! ping; then
  echo "the control failed: the emulated fabric is at fault, not the transport" >&2
  exit 3
fi
