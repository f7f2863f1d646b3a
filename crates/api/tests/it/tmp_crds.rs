#[test]
fn write_crds() {
    for (name, text) in queuebox_api::crds() {
        std::fs::write(format!("/tmp/{name}"), text).unwrap();
    }
}
