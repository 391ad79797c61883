#!/usr/bin/env bash
# Runs in the guest before our own tests: the two devices reach each other without a line of our
# code, with verbs alone and with the RDMA connection manager. A failure here is the fabric's.
set -uo pipefail

pingpong() {
  ibv_rc_pingpong -d rdma0 -g 1 -n 100 >/dev/null &
  sleep 1
  ibv_rc_pingpong -d rdma1 -g 1 -n 100 10.99.0.1 | grep iters && wait $!
}

# The client names its own address too: else its packets to an address of this machine take the
# loopback device.
ping() {
  rping -s -a 10.99.0.1 -C 20 -V &
  sleep 1
  rping -c -a 10.99.0.1 -I 10.99.0.2 -C 20 -V && wait $! && echo "20 rpings"
}

if ! pingpong || ! ping; then
  echo "the control failed: the emulated fabric is at fault, not the transport" >&2
  exit 3
fi
