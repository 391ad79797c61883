#!/usr/bin/env bash
# Runs in the guest, as root: four soft-RoCE devices, of which two and two talk over a wire.
#
#   rdma0 (10.99.0.1 on wire0)  <---- veth ---->  (10.99.0.2 on wire1) rdma1
#   rdma2 (10.99.0.3 on wire2)  <---- veth ---->  (10.99.0.4 on wire3) rdma3
#
# Linux 6.1 serves soft-RoCE only in the first network namespace, where two addresses would find each
# other through the loopback device, past the wire. So packets from one end of a wire to the other are
# routed before the table of local addresses is asked, and their arrival is routed by device.
#
# On top, two more namespaces stand for two hosts, host0 and host1. They have the first two addresses
# on a wire of their own, which carries what is not RDMA. Verbs can be used from there, as devices
# are shared between namespaces. By agreement host0 uses rdma0 and rdma2, and host1 the others.
set -euo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
hostname rdma-guest 2>/dev/null || echo rdma-guest >/proc/sys/kernel/hostname
printf '%s\n' '127.0.0.1 localhost rdma-guest' '10.99.0.1 host0' '10.99.0.2 host1' >/etc/hosts
ip link set lo up
# Without IPv6 the table of GIDs is short and known: 0 is link-local, 1 the IPv4 address as RoCE v2.
echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6
for n in 0 2; do ip link add "wire$n" type veth peer name "wire$((n + 1))"; done
for n in 0 1 2 3; do
  ip link set "wire$n" mtu 9000 up # before the device is made: then RoCE's own is 4096
  ip addr add "10.99.0.$((n + 1))/32" dev "wire$n"
done
for name in all wire0 wire1 wire2 wire3; do
  echo 0 >"/proc/sys/net/ipv4/conf/$name/rp_filter"
  echo 1 >"/proc/sys/net/ipv4/conf/$name/accept_local"
done
for n in 0 1 2 3; do
  own=10.99.0.$((n + 1)) other=10.99.0.$(((n ^ 1) + 1))
  ip rule add pref 11 iif "wire$n" lookup local
  ip rule add pref 12 from "$own" to "$other" lookup "$((70 + n))"
  ip route add "$other" dev "wire$n" src "$own" table "$((70 + n))"
  ip neigh replace "$other" dev "wire$n" nud permanent \
    lladdr "$(cat "/sys/class/net/wire$((n ^ 1))/address")"
done
ip rule add pref 90 lookup local
ip rule del pref 0
for n in 0 1 2 3; do rdma link add "rdma$n" type rxe netdev "wire$n"; done

ip link add host-wire0 type veth peer name host-wire1
for n in 0 1; do
  ip netns add "host$n"
  ip link set "host-wire$n" netns "host$n"
  ip -n "host$n" link set lo up
  ip -n "host$n" addr add "10.99.0.$((n + 1))/24" dev "host-wire$n"
  ip -n "host$n" link set "host-wire$n" up
done
