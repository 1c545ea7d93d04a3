BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0003');
CREATE TABLE deployment (
	deployment_id VARCHAR(64) NOT NULL, 
	home TEXT, counting_since_ms BIGINT, 
	CONSTRAINT pk_deployment PRIMARY KEY (deployment_id)
);
INSERT INTO "deployment" VALUES('11111111-2222-3333-4444-555555555555',NULL,1700000000000);
CREATE TABLE desired_states (
	stream_id VARCHAR(128) NOT NULL, 
	desired VARCHAR(16), 
	generation INTEGER NOT NULL, 
	reached INTEGER NOT NULL, 
	request_id VARCHAR(64), 
	upgrade TEXT, 
	preflight TEXT, 
	alert TEXT, 
	alert_until VARCHAR(16), 
	origin TEXT NOT NULL, 
	changed_at_ms BIGINT NOT NULL, 
	updated_at_ms BIGINT NOT NULL, 
	CONSTRAINT pk_desired_states PRIMARY KEY (stream_id), 
	CONSTRAINT fk_desired_states_stream_id_streams FOREIGN KEY(stream_id) REFERENCES streams (stream_id)
);
INSERT INTO "desired_states" VALUES('orders','RUNNING',3,0,'request-1','{"began_at_ms":1700000000000,"from_version":"v1","mode":"SAVEPOINT","old_execution_id":"execution-1","phase":"UPGRADING","reason":"it began","snapshot_id":"snapshot-4","started_at_ms":null,"starts":1,"to_version":"v2"}','{"at_ms":1700000000000,"batch_id":4,"code_version":"v2","passed":true,"reason":"one batch ran","refused_plan":null}','no run answers','STOPPED','anna',1700000049000,1700000055000);
CREATE TABLE event_counter (
	id INTEGER NOT NULL, 
	last_sequence BIGINT NOT NULL, 
	CONSTRAINT pk_event_counter PRIMARY KEY (id)
);
INSERT INTO "event_counter" VALUES(1,17);
CREATE TABLE events (
	sequence BIGINT NOT NULL, 
	stream_id VARCHAR(128) NOT NULL, 
	type VARCHAR(32) NOT NULL, 
	snapshot_id VARCHAR(64), 
	execution_id VARCHAR(64), 
	payload TEXT NOT NULL, 
	at_ms BIGINT NOT NULL, 
	CONSTRAINT pk_events PRIMARY KEY (sequence)
);
INSERT INTO "events" VALUES(1,'orders','EXECUTION_STARTED',NULL,'execution-1','{"cause":"MANUAL","run_id":"run-1"}',1700000005000);
INSERT INTO "events" VALUES(2,'orders','RESTORED',NULL,NULL,'{"batch_id":null,"duration_ms":null,"full_bytes":null,"kind":null,"live_directory":"/live/orders/live-1","new_timeline":false,"number":null,"origin":"EMPTY","source":null}',1700000007000);
INSERT INTO "events" VALUES(3,'orders','EXECUTION_RUNNING',NULL,'execution-1','{"kind":"EMPTY"}',1700000009000);
INSERT INTO "events" VALUES(4,'orders','CHECKPOINT_COMPLETED','snapshot-1','execution-1','{"batch_id":1,"duration_ms":82,"full_bytes":1001,"incremental_bytes":1,"kind":"CHECKPOINT","label":null,"location":"file:///snapshots/orders/chk-1","number":1}',1700000013000);
INSERT INTO "events" VALUES(5,'orders','CHECKPOINT_COMPLETED','snapshot-2','execution-1','{"batch_id":3,"duration_ms":82,"full_bytes":1002,"incremental_bytes":2,"kind":"CHECKPOINT","label":null,"location":"file:///snapshots/orders/chk-2","number":2}',1700000016000);
INSERT INTO "events" VALUES(6,'orders','CHECKPOINT_FAILED','snapshot-3','execution-1','{"duration_ms":1000,"failures":1,"kind":"CHECKPOINT","number":3,"reason":"the storage did not answer","tolerable":3}',1700000020000);
INSERT INTO "events" VALUES(7,'orders','SAVEPOINT_COMPLETED','snapshot-4','execution-1','{"batch_id":3,"duration_ms":82,"full_bytes":1004,"incremental_bytes":4,"kind":"SAVEPOINT","label":"end-of-june","location":"file:///savepoints/end-of-june","number":4}',1700000023000);
INSERT INTO "events" VALUES(8,'orders','SNAPSHOT_DELETED','snapshot-1',NULL,'{"batch_id":1,"full_bytes":1001,"kind":"CHECKPOINT","location":"file:///snapshots/orders/chk-1","number":1,"reason":"subsumed"}',1700000029000);
INSERT INTO "events" VALUES(9,'orders','RECOVERY_FAILED',NULL,'execution-1','{"batch_id":1,"detail":"it is damaged","error":"RestoreError","is_certain":true,"point":"snapshot-1","rewound_batches":2,"rewound_ms":60000}',1700000031000);
INSERT INTO "events" VALUES(10,'orders','EXECUTION_ENDED',NULL,'execution-1','{"duration_ms":28000,"reason":"the query failed","status":"FAILED"}',1700000033000);
INSERT INTO "events" VALUES(11,'orders','EXECUTION_STARTED',NULL,'execution-2','{"cause":"RESTART_NEW_RUN","run_id":"run-2"}',1700000036000);
INSERT INTO "events" VALUES(12,'orders','RESTORED','snapshot-2',NULL,'{"batch_id":3,"duration_ms":12,"full_bytes":1002,"kind":"CHECKPOINT","live_directory":"/live/orders/live-2","new_timeline":true,"number":2,"origin":"SNAPSHOT","source":null}',1700000038000);
INSERT INTO "events" VALUES(13,'orders','EXECUTION_ENDED',NULL,'execution-2','{"duration_ms":6000,"reason":"its process died","status":"FAILED"}',1700000042000);
INSERT INTO "events" VALUES(14,'orders','REQUEST_RESOLVED',NULL,NULL,'{"request_id":"request-2","status":"WITHDRAWN"}',1700000046000);
INSERT INTO "events" VALUES(15,'orders','DESIRED_STATE_SET',NULL,NULL,'{"desired":"RUNNING","origin":"anna"}',1700000050000);
INSERT INTO "events" VALUES(16,'orders','UPGRADE_CHANGED',NULL,NULL,'{"phase":"UPGRADING","reason":"it began","to_version":"v2"}',1700000052000);
INSERT INTO "events" VALUES(17,'orders','ALERT',NULL,NULL,'{"alert":"no run answers"}',1700000053000);
CREATE TABLE executions (
	execution_id VARCHAR(64) NOT NULL, 
	stream_id VARCHAR(128) NOT NULL, 
	ordinal INTEGER NOT NULL, 
	run_id TEXT NOT NULL, 
	cause VARCHAR(32) NOT NULL, 
	status VARCHAR(32) NOT NULL, 
	settled BOOLEAN NOT NULL, 
	host TEXT NOT NULL, 
	pid BIGINT NOT NULL, 
	started_at_ms BIGINT NOT NULL, 
	ended_at_ms BIGINT, 
	reason TEXT, 
	recovery TEXT, 
	live_directory TEXT, 
	progress TEXT, 
	heartbeat_at_ms BIGINT NOT NULL, 
	code_version TEXT, 
	application TEXT, 
	boot_id TEXT, 
	process_start_ticks BIGINT, 
	CONSTRAINT pk_executions PRIMARY KEY (execution_id), 
	CONSTRAINT fk_executions_stream_id_streams FOREIGN KEY(stream_id) REFERENCES streams (stream_id)
);
INSERT INTO "executions" VALUES('execution-1','orders',1,'run-1','MANUAL','FAILED',1,'host',11,1700000004000,1700000032000,'the query failed','{"kind":"EMPTY","source_identities":[{"identity":{"path":"file:/in"},"kind":"file","options":{}}]}','/live/orders/live-1','{"batch_id":3,"sinks":["FileSink[/out]"],"timestamp":"2023-11-14T22:13:20.000Z"}',1700000010000,'v1','{"id":"local-1","master":"local[2]","page":null}','boot',5);
INSERT INTO "executions" VALUES('execution-2','orders',2,'run-2','RESTART_NEW_RUN','FAILED',0,'host',11,1700000035000,1700000041000,'its process died',NULL,NULL,NULL,1700000035000,NULL,NULL,'boot',5);
CREATE TABLE holds (
	hold_id VARCHAR(64) NOT NULL, 
	snapshot_id VARCHAR(64) NOT NULL, 
	stream_id VARCHAR(128) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	holder TEXT NOT NULL, 
	request_id VARCHAR(64), 
	expires_at_ms BIGINT, 
	created_at_ms BIGINT NOT NULL, 
	CONSTRAINT pk_holds PRIMARY KEY (hold_id), 
	CONSTRAINT fk_holds_snapshot_id_snapshots FOREIGN KEY(snapshot_id) REFERENCES snapshots (snapshot_id), 
	CONSTRAINT fk_holds_stream_id_streams FOREIGN KEY(stream_id) REFERENCES streams (stream_id)
);
INSERT INTO "holds" VALUES('hold-1','snapshot-2','orders','TAG','anna',NULL,NULL,1700000026000);
INSERT INTO "holds" VALUES('hold-2','snapshot-4','orders','USE','verification',NULL,2700000027000,1700000027000);
INSERT INTO "holds" VALUES('hold-3','snapshot-2','orders','REFERENCE','request request-1','request-1',NULL,1700000043000);
CREATE TABLE launches (
	request_id VARCHAR(64) NOT NULL, 
	stream_id VARCHAR(128) NOT NULL, 
	run_id TEXT NOT NULL, 
	host TEXT NOT NULL, 
	boot_id TEXT NOT NULL, 
	pid BIGINT NOT NULL, 
	process_start_ticks BIGINT, 
	command TEXT NOT NULL, 
	log TEXT NOT NULL, 
	launched_at_ms BIGINT NOT NULL, 
	CONSTRAINT pk_launches PRIMARY KEY (request_id), 
	CONSTRAINT fk_launches_stream_id_streams FOREIGN KEY(stream_id) REFERENCES streams (stream_id)
);
INSERT INTO "launches" VALUES('request-1','orders','run-2','host','boot',13,8,'spark-submit driver.py','/tmp/driver.log',1700000047000);
CREATE TABLE leases (
	stream_id VARCHAR(128) NOT NULL, 
	execution_id VARCHAR(128), 
	run_id TEXT, 
	token BIGINT NOT NULL, 
	host TEXT, 
	pid BIGINT, 
	process_start_ticks BIGINT, 
	boot_id TEXT, 
	jvm_pid BIGINT, 
	jvm_start_ticks BIGINT, 
	acquired_at_ms BIGINT, 
	renewed_at_ms BIGINT, 
	expires_at_ms BIGINT, 
	predecessor_unproven BOOLEAN DEFAULT 0 NOT NULL, 
	CONSTRAINT pk_leases PRIMARY KEY (stream_id), 
	CONSTRAINT fk_leases_stream_id_streams FOREIGN KEY(stream_id) REFERENCES streams (stream_id)
);
INSERT INTO "leases" VALUES('orders','execution-2','run-2',2,'host',11,5,'boot',12,6,1700000034000,1700000034000,1700000064000,0);
CREATE TABLE metrics (
	stream_id VARCHAR(128) NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	kind VARCHAR(32) NOT NULL, 
	value BIGINT NOT NULL, 
	CONSTRAINT pk_metrics PRIMARY KEY (stream_id, name, kind)
);
INSERT INTO "metrics" VALUES('orders','snapshot.completed','checkpoint',2);
INSERT INTO "metrics" VALUES('orders','snapshot.completed','savepoint',1);
INSERT INTO "metrics" VALUES('orders','snapshot.failed','checkpoint',1);
INSERT INTO "metrics" VALUES('orders','snapshot.written','checkpoint',5);
INSERT INTO "metrics" VALUES('orders','stream.restarts','new_run',1);
INSERT INTO "metrics" VALUES('orders','retention.freed','',77);
INSERT INTO "metrics" VALUES('orders','snapshot.last.duration','checkpoint',1500);
INSERT INTO "metrics" VALUES('orders','snapshot.last.timestamp','checkpoint',1700000500000);
CREATE TABLE planned_batches (
	stream_id VARCHAR(128) NOT NULL, 
	batch_id BIGINT NOT NULL, 
	follows VARCHAR(64) NOT NULL, 
	is_committed BOOLEAN NOT NULL, 
	files TEXT NOT NULL, 
	CONSTRAINT pk_planned_batches PRIMARY KEY (stream_id, batch_id), 
	CONSTRAINT fk_planned_batches_stream_id_streams FOREIGN KEY(stream_id) REFERENCES streams (stream_id)
);
INSERT INTO "planned_batches" VALUES('orders',4,'ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff',1,'{"#rows":17,"metadata":"eJyrVspMUbJSKixNLarUNVSqBQArbwUc","offsets/4":"eJwrM+SqrgUiAAs3Aqw="}');
INSERT INTO "planned_batches" VALUES('orders',5,'eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',0,'{"offsets/5":"eJwrM+SqrgUiAAs3Aqw="}');
CREATE TABLE recovery_failures (
	stream_id VARCHAR(128) NOT NULL, 
	ordinal INTEGER NOT NULL, 
	execution_id VARCHAR(64) NOT NULL, 
	point TEXT NOT NULL, 
	error VARCHAR(128) NOT NULL, 
	detail TEXT NOT NULL, 
	is_certain BOOLEAN NOT NULL, 
	batch_id BIGINT, 
	rewound_batches BIGINT, 
	rewound_ms BIGINT, 
	is_over BOOLEAN NOT NULL, 
	at_ms BIGINT NOT NULL, 
	CONSTRAINT pk_recovery_failures PRIMARY KEY (stream_id, ordinal), 
	CONSTRAINT fk_recovery_failures_stream_id_streams FOREIGN KEY(stream_id) REFERENCES streams (stream_id)
);
INSERT INTO "recovery_failures" VALUES('orders',1,'execution-1','snapshot-1','RestoreError','it is damaged',1,1,2,60000,0,1700000030000);
CREATE TABLE requests (
	request_id VARCHAR(64) NOT NULL, 
	stream_id VARCHAR(128) NOT NULL, 
	kind VARCHAR(32) NOT NULL, 
	status VARCHAR(32) NOT NULL, 
	arguments TEXT NOT NULL, 
	origin TEXT NOT NULL, 
	snapshot_id VARCHAR(64), 
	error TEXT, 
	created_at_ms BIGINT NOT NULL, 
	resolved_at_ms BIGINT, 
	CONSTRAINT pk_requests PRIMARY KEY (request_id), 
	CONSTRAINT fk_requests_stream_id_streams FOREIGN KEY(stream_id) REFERENCES streams (stream_id)
);
INSERT INTO "requests" VALUES('request-1','orders','START','PENDING','{"start_from":"latest"}','anna',NULL,NULL,1700000043000,NULL);
INSERT INTO "requests" VALUES('request-2','orders','SAVEPOINT','WITHDRAWN','{"label":"x"}','anna',NULL,NULL,1700000044000,1700000045000);
CREATE TABLE snapshots (
	snapshot_id VARCHAR(64) NOT NULL, 
	stream_id VARCHAR(128) NOT NULL, 
	execution_id VARCHAR(64), 
	kind VARCHAR(32) NOT NULL, 
	number INTEGER, 
	status VARCHAR(32) NOT NULL, 
	"trigger" VARCHAR(32) NOT NULL, 
	timeline INTEGER NOT NULL, 
	location TEXT, 
	batch_id BIGINT, 
	query_id VARCHAR(64), 
	full_bytes BIGINT, 
	incremental_bytes BIGINT, 
	file_count INTEGER, 
	rows BIGINT, 
	state_rows BIGINT, 
	records_behind BIGINT, 
	watermark TEXT, 
	duration_ms BIGINT, 
	label TEXT, 
	request_id VARCHAR(64), 
	properties TEXT NOT NULL, 
	failure_reason TEXT, 
	created_at_ms BIGINT NOT NULL, 
	completed_at_ms BIGINT, 
	claimed BOOLEAN DEFAULT 0 NOT NULL, 
	schedule TEXT, 
	verified_at_ms BIGINT, 
	verified_problem TEXT, 
	CONSTRAINT pk_snapshots PRIMARY KEY (snapshot_id), 
	CONSTRAINT fk_snapshots_stream_id_streams FOREIGN KEY(stream_id) REFERENCES streams (stream_id)
);
INSERT INTO "snapshots" VALUES('snapshot-1','orders','execution-1','CHECKPOINT',1,'DELETED','PERIODIC',0,'file:///snapshots/orders/chk-1',1,'query-1',1001,1,9,10,5,7,'2023-11-14T22:13:20.000Z',82,NULL,NULL,'{"plan":{"operators":[{"keys":[["k","bigint"]],"kind":"Aggregate"}],"output_mode":"Update","version":1},"records_behind":{"orders-0":3,"orders-1":4}}',NULL,1700000011000,1700000012000,0,NULL,1700000025000,'chk-1/_metadata is damaged');
INSERT INTO "snapshots" VALUES('snapshot-2','orders','execution-1','CHECKPOINT',2,'COMPLETED','PERIODIC',0,'file:///snapshots/orders/chk-2',3,'query-1',1002,2,9,10,5,7,'2023-11-14T22:13:20.000Z',82,'kept',NULL,'{"plan":{"operators":[{"keys":[["k","bigint"]],"kind":"Aggregate"}],"output_mode":"Update","version":1},"proven_at_ms":1700000017000,"records_behind":{"orders-0":3,"orders-1":4}}',NULL,1700000014000,1700000015000,0,NULL,NULL,NULL);
INSERT INTO "snapshots" VALUES('snapshot-3','orders','execution-1','CHECKPOINT',3,'FAILED','PERIODIC',0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'{}','the storage did not answer',1700000018000,NULL,0,NULL,NULL,NULL);
INSERT INTO "snapshots" VALUES('snapshot-4','orders','execution-1','SAVEPOINT',4,'COMPLETED','MANUAL',0,'file:///savepoints/end-of-june',3,'query-1',1004,4,9,10,5,7,'2023-11-14T22:13:20.000Z',82,'end-of-june',NULL,'{"edit":{"by":"anna","id":"edit-1"},"plan":{"operators":[{"keys":[["k","bigint"]],"kind":"Aggregate"}],"output_mode":"Update","version":1},"proven_at_ms":1700000024000,"records_behind":{"orders-0":3,"orders-1":4},"state_edits":["edit-1"]}',NULL,1700000021000,1700000022000,0,'monthly',1700000024000,NULL);
CREATE TABLE streams (
	stream_id VARCHAR(128) NOT NULL, 
	name TEXT NOT NULL, 
	asset_key TEXT NOT NULL, 
	options TEXT NOT NULL, 
	live_directory TEXT, 
	live_generation INTEGER NOT NULL, 
	timeline INTEGER NOT NULL, 
	restored_snapshot_id VARCHAR(64), 
	preferred_savepoint_id VARCHAR(64), 
	pending_restore TEXT, 
	"plan" TEXT, 
	accepted_plan VARCHAR(80), 
	origin TEXT, 
	state_edits TEXT, 
	next_number INTEGER NOT NULL, 
	created_at_ms BIGINT NOT NULL, 
	updated_at_ms BIGINT NOT NULL, 
	CONSTRAINT pk_streams PRIMARY KEY (stream_id)
);
INSERT INTO "streams" VALUES('orders','orders','orders','{"interval_ms":60000,"num_retained":2}','/live/orders/live-2',2,1,'snapshot-2','snapshot-4','{"location":"file:///snapshots/orders/chk-2","sinks":["FileSink[/out]"],"snapshot_id":"snapshot-2","to_batch":3}','{"operators":[{"keys":[["k","bigint"]],"kind":"Aggregate"}],"output_mode":"Update","version":1}','plan-2:abc','{"batch_id":3,"directory":"/live/orders/live-1","kind":"SNAPSHOT","location":"file:///snapshots/orders/chk-2","query_id":"query-1","sinks":["FileSink[/out]"],"snapshot_id":"snapshot-2","snapshot_kind":"CHECKPOINT","snapshot_number":2}','["edit-1"]',5,1700000001000,1700000040000);
INSERT INTO "streams" VALUES('copies','copies','copies','{}',NULL,0,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,1,1700000002000,1700000002000);
CREATE TABLE timelines (
	stream_id VARCHAR(128) NOT NULL, 
	timeline INTEGER NOT NULL, 
	parent INTEGER NOT NULL, 
	to_batch BIGINT NOT NULL, accepted TEXT, 
	CONSTRAINT pk_timelines PRIMARY KEY (stream_id, timeline), 
	CONSTRAINT fk_timelines_stream_id_streams FOREIGN KEY(stream_id) REFERENCES streams (stream_id)
);
INSERT INTO "timelines" VALUES('orders',1,0,3,'they only count visits');
CREATE INDEX ix_events_stream_id_sequence ON events (stream_id, sequence);
CREATE INDEX ix_executions_settled ON executions (settled);
CREATE INDEX ix_executions_stream_id_ended_at_ms ON executions (stream_id, ended_at_ms);
CREATE INDEX ix_executions_stream_id_ordinal ON executions (stream_id, ordinal);
CREATE INDEX ix_launches_stream_id_launched_at_ms ON launches (stream_id, launched_at_ms);
CREATE INDEX ix_requests_status_kind ON requests (status, kind);
CREATE INDEX ix_requests_stream_id_status ON requests (stream_id, status);
CREATE INDEX ix_snapshots_stream_id_completed_at_ms ON snapshots (stream_id, completed_at_ms);
CREATE INDEX ix_snapshots_stream_id_created_at_ms ON snapshots (stream_id, created_at_ms);
CREATE INDEX ix_snapshots_stream_id_status_number ON snapshots (stream_id, status, number);
CREATE INDEX ix_snapshots_stream_id_verified_at_ms ON snapshots (stream_id, verified_at_ms);
CREATE INDEX ix_holds_snapshot_id ON holds (snapshot_id);
CREATE INDEX ix_holds_stream_id_kind ON holds (stream_id, kind);
COMMIT;
