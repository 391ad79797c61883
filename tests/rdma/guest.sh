#!/usr/bin/env bash
# Runs in the guest: a control without our code, our C++ side over the same devices, both speeds.
#
#   guest.sh FOLDER    # with stress and speed, built from csrc/tests
set -euo pipefail
folder=$1
devices=(rdma0 rdma1 1)

source "$(dirname "${BASH_SOURCE[0]}")/control.sh"

"$folder/stress" rdma 2500 65536 "${devices[@]}"
"$folder/stress" rdma 5 6291456 "${devices[@]}"

reference() {
  ib_write_bw -F -d rdma0 -x 1 -s "$1" -n "$2" >/dev/null &
  await_port 18515
  ib_write_bw -F -d rdma1 -x 1 -s "$1" -n "$2" 10.99.0.1 | awk -v size="$1" '$1 == size {print $4}'
  wait $!
}
for bytes in 4194304 16777216; do
  count=$((134217728 / bytes))
  echo "ib_write_bw $bytes: $(reference "$bytes" "$count") MiB/s"
  echo "ours $bytes: $("$folder/speed" rdma "$count" "$bytes" "${devices[@]}") MB/s"
done

# Last, because the wire stays cut. The control connections of stress are inside its process, so what
# ends it is the lost RDMA path alone.
"$folder/stress" rdma 1000000 65536 "${devices[@]}" >"/tmp/cut" 2>&1 &
sleep 5
ip link set wire1 down
start=$SECONDS
wait $! || true
echo "the cut was named after $((SECONDS - start)) s: $(cat /tmp/cut)"
