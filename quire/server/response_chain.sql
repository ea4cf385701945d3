WITH RECURSIVE chain (id, previous, used, record, depth) AS (
    SELECT id, previous, used, record, 0 FROM quire_responses WHERE id = ? AND owner = ? AND used >= ?
    UNION ALL
    SELECT older.id, older.previous, older.used, older.record, chain.depth + 1
    FROM quire_responses AS older JOIN chain ON older.id = chain.previous WHERE older.owner = ?)
SELECT id, used, record FROM chain ORDER BY depth DESC
