# Keeps one shared peer: starts it, and ends it when nobody has used it for a while.
#
# Arguments: the peer's folder, the idle time in seconds, the signal that stops it cleanly.
# A user holds a shared lock on `users`, which the kernel gives back when the user ends in whatever way. Starting and
# ending happen under an exclusive lock on `door`.
trap '' INT TERM HUP
dir=$1 linger=$2 stop=$3
sh "$dir/run" </dev/null >>"$dir/log" 2>&1 &
server=$!
echo "$server" >"$dir/server.pid"
exec 9>"$dir/door"
idle=0
while kill -0 "$server" 2>/dev/null; do
    sleep 1
    if flock -n -x "$dir/users" true; then idle=$((idle + 1)); else idle=0; continue; fi
    [ -e "$dir/stop" ] || [ "$idle" -gt "$linger" ] || continue
    flock -n -x 9 || continue
    if flock -n -x "$dir/users" true; then
        rm -f "$dir/state.json" "$dir/stop"
        kill "-$stop" "$server" 2>/dev/null
        waited=0
        while kill -0 "$server" 2>/dev/null && [ "$waited" -lt 100 ]; do
            sleep 0.1
            waited=$((waited + 1))
        done
        kill -KILL "$server" 2>/dev/null
        wait "$server" 2>/dev/null
        rm -rf "$dir/data" "$dir/server.pid"
        exit 0
    fi
    flock -u 9
done
