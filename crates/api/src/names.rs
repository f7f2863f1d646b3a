//! Near misses: what a misspelt name may have meant (contract 13.1).

/// The nearest of `known` within the bound: at most two edits, one for names of up to four letters; a swap of two
/// neighbours counts as one. Of equally near ones the first.
pub fn nearest<'k>(word: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    let bound = if word.chars().count() <= 4 { 1 } else { 2 };
    known
        .into_iter()
        .filter(|candidate| *candidate != word)
        .map(|candidate| (edits(word, candidate, bound), candidate))
        .filter(|(edits, _)| *edits <= bound)
        .min_by_key(|(edits, _)| *edits)
        .map(|(_, candidate)| candidate)
}

/// Edits between two words: insert, delete, replace, swap (optimal string alignment). Gives up above `bound`.
fn edits(a: &str, b: &str, bound: usize) -> usize {
    let a: Vec<char> = a.chars().collect();
    let b: Vec<char> = b.chars().collect();
    if a.len().abs_diff(b.len()) > bound {
        return bound + 1;
    }
    let mut before = vec![0; b.len() + 1];
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for (row, left) in a.iter().enumerate() {
        let mut current = vec![row + 1; b.len() + 1];
        for (column, right) in b.iter().enumerate() {
            let replaced = above[column] + usize::from(left != right);
            let mut best = replaced.min(above[column + 1] + 1).min(current[column] + 1);
            if row > 0 && column > 0 && *left == b[column - 1] && a[row - 1] == *right {
                best = best.min(before[column - 1] + 1);
            }
            current[column + 1] = best;
        }
        before = std::mem::replace(&mut above, current);
    }
    above[b.len()]
}

/// A name that Kubernetes accepts for objects: letters, digits, `-` and `.`, lower case, at most 253 characters.
pub fn is_object_name(name: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = name.as_bytes();
    (1..=253).contains(&bytes.len())
        && bytes.iter().all(|byte| is_inner(*byte) || matches!(byte, b'-' | b'.'))
        && name
            .split('.')
            .all(|part| part.bytes().next().is_some_and(is_inner) && part.bytes().next_back().is_some_and(is_inner))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_misses_are_found_within_their_bound() {
        let known = ["topics", "destinations", "url", "path", "timeout"];
        for (word, expected) in [
            ("topcis", Some("topics")),
            ("destination", Some("destinations")),
            ("destinatoins", Some("destinations")),
            ("ulr", Some("url")),
            ("utl", Some("url")),
            ("uurl", Some("url")),
            ("pth", Some("path")),
            ("pah", Some("path")),
            ("tmeout", Some("timeout")),
            ("timeouts", Some("timeout")),
            ("tmeotu", Some("timeout")),
            ("ptha", None),
            ("phat", None),
            ("ur", Some("url")),
            ("ult", None),
            ("port", None),
            ("", None),
            ("url", None),
        ] {
            assert_eq!(nearest(word, known), expected, "{word}");
        }
    }

    #[test]
    fn object_names_are_those_of_kubernetes() {
        for name in ["a", "shop-1", "a.b", "0"] {
            assert!(is_object_name(name), "{name}");
        }
        for name in ["", "A", "a_b", "-a", "a-", "a..b", ".a", "é", &"a".repeat(254)] {
            assert!(!is_object_name(name), "{name}");
        }
    }
}
