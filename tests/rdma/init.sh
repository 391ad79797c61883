#!/bin/busybox sh
# The guest's first process: drivers, the host's files below a throw-away layer, then the job of
# vm.py, whose output and exit status go to the host through three virtio ports. The kernel's command
# line has job=DIRECTORY, which is also where the host keeps job.sh and network.sh.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for module in /modules/*; do
  insmod "$module" || echo "rdma guest: $module was refused" >/dev/console
done
read -r line </proc/cmdline
for word in $line; do
  case $word in job=*) job=${word#job=} ;; esac
done

# The host's root is only read; what is written lands in memory and is forgotten.
nine=trans=virtio,version=9p2000.L,msize=262144
mount -t 9p -o "ro,$nine,cache=loose" host /host
mount -t tmpfs -o size=75% layer /layer
mkdir /layer/upper /layer/work
mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work overlay /root
mkdir -p /root/proc /root/sys /root/dev /root/tmp "/root$job"
for folder in proc sys dev; do
  mount --move "/$folder" "/root/$folder"
  rm -rf "/${folder:?}" # the kernel put a console there
  ln -s "root/$folder" "/$folder"
done
mkdir -p /root/dev/shm /root/dev/pts
mount -t tmpfs -o mode=1777 shm /root/dev/shm
mount -t devpts pts /root/dev/pts
mount -t tmpfs -o mode=755 run /root/run
mount -t 9p -o "ro,$nine" job "/root$job"
for link in fd: stdin:/0 stdout:/1 stderr:/2; do
  ln -sfn "/proc/self/fd${link#*:}" "/root/dev/${link%%:*}"
done

# Ports are numbered from 1 behind a name that the kernel chooses; each can be opened once, so the
# job writes into pipes and two pumps own the ports.
until ls /dev/vport*p3 >/dev/null 2>&1; do sleep 0.1; done
for port in /dev/vport*p3; do ports=${port%3}; done
mkfifo /out /err
cat /out >"${ports}1" &
cat /err >"${ports}2" &
setsid chroot /root /bin/bash "$job/job.sh" </dev/null >/out 2>/err
status=$?
# What the job has left would keep the pumps waiting. They and the kernel's threads are in session 0.
for process in /proc/[0-9]*; do
  read -r line <"$process/stat" || continue
  # shellcheck disable=SC2086
  set -- ${line##*) }
  [ "$4" = 0 ] || kill -9 "${process#/proc/}"
done
wait
echo "$status" >"${ports}3"
sleep 0.2
echo o >/root/proc/sysrq-trigger
sleep 60
