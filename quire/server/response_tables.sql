CREATE TABLE IF NOT EXISTS quire_responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, used DOUBLE PRECISION NOT NULL, size BIGINT NOT NULL,
    record {blob} NOT NULL);
CREATE INDEX IF NOT EXISTS quire_responses_used ON quire_responses (used, id);
CREATE TABLE IF NOT EXISTS quire_responses_size (total BIGINT NOT NULL);
INSERT INTO quire_responses_size SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM quire_responses_size)
