#!/bin/sh
# Runs in a booted container, as a service of its own: prints what happens to the daemon and its blocks, a line each.
exec >/checked 2>&1
set -u
config=/etc/kvoffd/kvoffd.toml
say() { name=$1; shift; echo "$name: $("$@" 2>&1 | tail -1)"; }
pid() { systemctl show --property=MainPID --value kvoffd; }
traffic() { PYTHONWARNINGS=error /opt/kvoffd/bin/python /traffic.py "$1" /run/kvoffd; }
active() {
    for _ in $(seq 150); do
        [ "$(systemctl is-active kvoffd)" = active ] && break
        sleep 0.2
    done
    systemctl is-active kvoffd
}

systemctl start kvoffd
say started active
say stored traffic store
# What the unit hides of /proc is not what the page needs.
page='import urllib.request as r; print(b"process_start_time_seconds " in r.urlopen("http://127.0.0.1:9464/metrics").read())'
say "tells its start" /opt/kvoffd/bin/python -c "$page"
before=$(pid)

sed -i 's/^pool_size/pool_sise/' $config
systemctl reload kvoffd
echo "reload of a typo: $?"
[ "$(pid)" = "$before" ]; echo "same process: $?"
say "found after the reload" traffic find

# More often than systemd's own default, five times in ten seconds, would bear.
for _ in 1 2 3 4 5 6 7 8; do systemctl restart kvoffd; done
sleep 12
say "with the typo" systemctl is-active kvoffd
say "tried" systemctl show --property=NRestarts --value kvoffd
sed -i 's/^pool_sise/pool_size/' $config
say "mended" active
say "found after the typo" traffic find

systemctl reload kvoffd
echo "reload of what is right: $?"
for _ in 1 2 3 4 5 6; do
    systemctl kill --kill-who=main --signal=KILL kvoffd
    sleep 0.3
    active >/dev/null
done
say "after six kills" active
say "found after six kills" traffic find
say "refusals as errors" sh -c 'journalctl -u kvoffd -p 3..3 -o cat | grep -c "^kvoffd: .*pool_sise.*did you mean pool_size"'
say "information as such" sh -c 'journalctl -u kvoffd -p 6..6 -o cat | grep -c " INFO kvoffd.server.daemon: Serving"'
say "anything else above" sh -c 'journalctl -u kvoffd _SYSTEMD_UNIT=kvoffd.service -p 4 -o cat | grep -v "^kvoffd: .*pool_sise" | grep -c .'
journalctl -u kvoffd -o short-monotonic >/journal
echo "done: yes"
