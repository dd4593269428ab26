"""The lab: it trains, compares, reports and benches. Its rooms meet through records on disk."""
