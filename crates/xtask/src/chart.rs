//! The generated files of the Helm chart: CRD templates, files copied from `deploy/`, the table of values in its README.
//!
//! Invariant: whatever the chart shares with the rest of the repository has one source, and it is not in the chart.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

const CHART: &str = "charts/queuebox";
/// What the chart needs inside its folder, since Helm reads nothing outside of it.
const COPIES: [(&str, &str); 4] = [
    ("deploy/rbac/operator-lease-rules.yaml", "files/operator-lease-rules.yaml"),
    ("deploy/rbac/operator-rules.yaml", "files/operator-rules.yaml"),
    ("deploy/monitoring/alerts.yaml", "files/alerts.yaml"),
    ("deploy/monitoring/dashboard.json", "files/dashboard.json"),
];
const BEGIN: &str = "<!-- values: made from values.yaml by `cargo xtask gen` -->\n";
const END: &str = "<!-- /values -->\n";

/// Every generated file of the chart with its content. `crds` is what `queuebox generate crds` prints.
pub fn files(crds: &str) -> Result<Vec<(String, String)>> {
    let mut files = Vec::new();
    for document in crds.split("---\n") {
        let (name, template) = crd_template(document)?;
        files.push((format!("{CHART}/templates/crds/{name}.yaml"), template));
    }
    for (from, to) in COPIES {
        files.push((format!("{CHART}/{to}"), read(from)?));
    }
    let readme = format!("{CHART}/README.md");
    let table = values_table(&read(&format!("{CHART}/values.yaml"))?)?;
    files.push((readme.clone(), with_table(&read(&readme)?, &table)?));
    Ok(files)
}

fn read(file: &str) -> Result<String> {
    std::fs::read_to_string(crate::root().join(file)).with_context(|| file.to_owned())
}

/// A CRD as a template, with the plural of its kind.
fn crd_template(crd: &str) -> Result<(&str, String)> {
    let (head, rest) = crd.split_once("metadata:\n  name: ").context("a CRD without metadata.name at its beginning")?;
    let (name, body) = rest.split_once('\n').context("a CRD that ends with its name")?;
    let plural = name.split('.').next().unwrap_or(name);
    // Descriptions speak of templates in double braces, which are not meant for Helm.
    let body = body.replace("{{", "{{ \"{{\" }}");
    let template = format!(
        "{{{{- /* Made by `cargo xtask gen`. */ -}}}}\n{{{{- if .Values.crds.enabled }}}}\n{head}metadata:\n  name: {name}\n  labels:\n    \
         {{{{- include \"queuebox.labels\" . | nindent 4 }}}}\n  {{{{- with include \"queuebox.crdAnnotations\" . }}}}\n  \
         {{{{- . | nindent 2 }}}}\n  {{{{- end }}}}\n{body}{{{{- end }}}}\n"
    );
    Ok((plural, template))
}

fn with_table(readme: &str, table: &str) -> Result<String> {
    let (before, rest) =
        readme.split_once(BEGIN).with_context(|| format!("{CHART}/README.md lacks the line {BEGIN}"))?;
    let (_, after) = rest.split_once(END).with_context(|| format!("{CHART}/README.md lacks the line {END}"))?;
    Ok(format!("{before}{BEGIN}{table}{END}{after}"))
}

/// A Markdown table of all values. Each is described by a comment `# -- …` above it; a described map or list is one row.
fn values_table(text: &str) -> Result<String> {
    let values: Value = serde_saphyr::from_str(text).context("values.yaml")?;
    let mut descriptions = descriptions(text);
    let mut rows = Vec::new();
    walk(&values, "", &mut descriptions, &mut rows)?;
    ensure!(descriptions.is_empty(), "values.yaml describes what is no value: {:?}", descriptions.keys());
    let mut table = "| value | default | meaning |\n|---|---|---|\n".to_owned();
    for (path, default, meaning) in rows {
        let _ = writeln!(table, "| `{path}` | `{default}` | {meaning} |");
    }
    Ok(table)
}

fn walk(
    value: &Value,
    path: &str,
    descriptions: &mut BTreeMap<String, String>,
    rows: &mut Vec<(String, String, String)>,
) -> Result<()> {
    if let Some(meaning) = descriptions.remove(path) {
        rows.push((path.to_owned(), value.to_string(), meaning.replace('|', "\\|")));
        return Ok(());
    }
    let Value::Object(fields) = value else {
        bail!("values.yaml: {path} has no comment `# -- …`");
    };
    for (name, value) in fields {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        walk(value, &path, descriptions, rows)?;
    }
    Ok(())
}

/// Comments by the path of the value below them. Reads the block style that values.yaml is written in.
fn descriptions(text: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut path: Vec<(usize, &str)> = Vec::new();
    let mut comment: Option<String> = None;
    for line in text.lines() {
        let trimmed = line.trim_start();
        let indent = line.len() - trimmed.len();
        if let Some(begin) = trimmed.strip_prefix("# -- ") {
            comment = Some(begin.to_owned());
        } else if let Some(more) = trimmed.strip_prefix("# ") {
            if let Some(comment) = &mut comment {
                comment.push(' ');
                comment.push_str(more);
            }
        } else if let Some((key, _)) = trimmed.split_once(':') {
            path.retain(|(depth, _)| *depth < indent);
            path.push((indent, key));
            if let Some(comment) = comment.take() {
                let keys: Vec<&str> = path.iter().map(|(_, key)| *key).collect();
                found.insert(keys.join("."), comment);
            }
        } else {
            comment = None;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_a_row_of_the_table() {
        let table =
            values_table("image:\n  # -- Which tag;\n  # or none.\n  tag: \"\"\n# -- Labels.\nlabels: {a: b}\n")
                .unwrap();
        assert!(
            table.ends_with(
                "| `image.tag` | `\"\"` | Which tag; or none. |\n| `labels` | `{\"a\":\"b\"}` | Labels. |\n"
            ),
            "{table}"
        );
    }

    #[test]
    fn a_value_without_a_comment_is_an_error() {
        let error = values_table("image:\n  tag: \"\"\n").unwrap_err();
        assert!(error.to_string().contains("image.tag"), "{error}");
    }

    #[test]
    fn braces_of_a_description_are_not_helms() {
        let (name, template) =
            crd_template("kind: X\nmetadata:\n  name: relays.queuebox.io\nspec:\n  d: a {{ topic }}\n").unwrap();
        assert_eq!(name, "relays");
        assert!(template.contains("d: a {{ \"{{\" }} topic }}\n"), "{template}");
    }
}
