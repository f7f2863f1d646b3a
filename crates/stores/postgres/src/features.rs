//! What the tables of this database can do: found by the check at start, and put into every statement (contract 2.5).

/// Features that depend on columns and tables which a classic installation lacks, and on the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features {
    /// `queuebox_worker` and `queuebox_lane` are there; otherwise rows are claimed.
    pub lanes: bool,
    /// `outbox.destination` and `outbox.parent_id`.
    pub fan_out: bool,
    /// `outbox.crashes`.
    pub crashes: bool,
    /// `outbox.trace_parent`.
    pub trace: bool,
    /// `inbox.crashes`.
    pub inbox_crashes: bool,
    /// `inbox.trace_parent`.
    pub inbox_trace: bool,
    /// `inbox.topic`.
    pub topics: bool,
    /// `outbox.onSent: Delete`.
    pub on_sent_delete: bool,
    /// A key column's collation takes different bytes for equal (contract 2.4).
    pub merging_keys: bool,
    /// The default of `sequence` is one that the safe floor can rely on.
    pub floor: bool,
}

impl Features {
    /// Everything that tables of the newest version can do.
    pub fn newest(on_sent_delete: bool) -> Self {
        Self {
            lanes: true,
            fan_out: true,
            crashes: true,
            trace: true,
            inbox_crashes: true,
            inbox_trace: true,
            topics: true,
            on_sent_delete,
            merging_keys: false,
            floor: false,
        }
    }

    /// The words that statement templates know.
    pub fn words(&self) -> Vec<&'static str> {
        [
            (self.lanes, "lanes"),
            (self.fan_out, "fan_out"),
            (self.crashes, "crashes"),
            (self.trace, "trace"),
            (self.inbox_crashes, "inbox_crashes"),
            (self.inbox_trace, "inbox_trace"),
            (self.topics, "topics"),
            (self.on_sent_delete && self.fan_out, "delete_parents"),
        ]
        .into_iter()
        .filter_map(|(on, word)| on.then_some(word))
        .collect()
    }

    /// The lane of a row, as an integer expression; `o` and `i` are the aliases of the two tables. All lanes count as ours
    /// where nothing is hashed.
    pub fn lane_expressions(&self) -> (&'static str, &'static str) {
        let outbox = if self.fan_out {
            "(hashtextextended(coalesce(nullif(o.{o.key}, ''), o.{o.parent_id}::text, o.{o.id}::text), 0) & 63)::integer"
        } else {
            "(hashtextextended(coalesce(nullif(o.{o.key}, ''), o.{o.id}::text), 0) & 63)::integer"
        };
        (outbox, "(hashtextextended(coalesce(nullif(i.{i.aggregate_id}, ''), i.{i.id}::text), 0) & 63)::integer")
    }
}
