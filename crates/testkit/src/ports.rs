//! Ports that nobody else uses, across all test processes of the machine.

use std::fs::File;
use std::net::TcpListener;
use std::sync::Mutex;

/// Below the kernel's range for outgoing connections, so that a server that is restarted finds its port still free.
const RANGE: std::ops::Range<u16> = 10_240..32_000;

/// Claims of this process. A claim is a locked file and ends with the process.
static CLAIMS: Mutex<Vec<File>> = Mutex::new(Vec::new());

/// A TCP port of 127.0.0.1 that is free now and that no other test is given while this process lives.
pub fn free_port() -> u16 {
    let folder = std::env::temp_dir().join("queuebox-testkit-ports");
    std::fs::create_dir_all(&folder).expect("folder for port claims");
    for _ in 0..10_000 {
        let port = rand::random_range(RANGE);
        let Ok(file) = File::create(folder.join(port.to_string())) else { continue };
        if file.try_lock().is_err() || TcpListener::bind(("127.0.0.1", port)).is_err() {
            continue;
        }
        CLAIMS.lock().expect("claims").push(file);
        return port;
    }
    panic!("no free port on 127.0.0.1 between {} and {}", RANGE.start, RANGE.end);
}
